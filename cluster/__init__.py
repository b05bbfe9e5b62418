"""The Serve deployments and what connects them: gateway, workers, feeds, HTTP API."""
