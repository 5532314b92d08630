"""The wire: what clients may write and what they read. The OpenAPI schema is made from it."""
