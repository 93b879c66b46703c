"""The engine: requests in, tokens out; it knows neither files nor HTTP."""
