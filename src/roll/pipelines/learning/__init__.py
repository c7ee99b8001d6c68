"""What every pipeline does between scored rollouts and new weights."""
