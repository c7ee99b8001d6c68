"""An engine, a reward, an environment, a loss and a pipeline for ROLL."""
