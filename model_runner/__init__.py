"""The engine: admission, batching and the model. Importing this package imports nothing heavy."""
