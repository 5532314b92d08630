"""The wire: what clients may write (requests) and what they read (responses). The OpenAPI schema is made from it."""
