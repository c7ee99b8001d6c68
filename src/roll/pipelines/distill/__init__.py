"""On-policy distillation: the student samples answers, and a teacher scores every token."""
