"""The sandbox service: `roll-sandbox serve`. See docs/sandbox-service.md."""
