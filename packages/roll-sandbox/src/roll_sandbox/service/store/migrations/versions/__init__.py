"""The migrations, one module per version."""
