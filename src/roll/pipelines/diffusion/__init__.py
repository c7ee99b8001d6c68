"""Training of diffusion and flow models, on images of a dataset or with rewards for the policy's samples."""
