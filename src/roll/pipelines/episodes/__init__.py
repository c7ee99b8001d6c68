"""What runs draw that learn from episodes: a curriculum of environments, anchors, and demonstrations of the user."""
