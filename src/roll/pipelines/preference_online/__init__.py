"""Learning from preferences among fresh rollouts."""
