"""The engine: models, paged KV, scheduling and sampling. Knows neither Ray nor roles."""
