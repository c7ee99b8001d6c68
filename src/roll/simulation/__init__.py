"""Virtual time, and models of engines, trainers and rewards: the production schedulers run here without hardware."""
