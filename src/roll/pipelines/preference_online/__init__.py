"""Preference training on pairs of fresh rollouts (online DPO)."""
