"""Virtual time, and models of engines, trainers and rewards: runs the production schedulers without hardware."""
