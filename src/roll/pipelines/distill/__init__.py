"""On-policy distillation: the student answers, a teacher scores every token."""
