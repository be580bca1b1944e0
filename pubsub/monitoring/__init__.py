"""What the daemon tells monitors by HTTP: metrics, health and readiness."""
