"""Training of diffusion and flow models, on given images or from rewards of the policy's own samples."""
