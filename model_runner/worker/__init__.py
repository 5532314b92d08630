"""The only place that knows torch: weights, the paged KV tensors, attention, the forward pass, sampling."""
