"""Adapters merged into the weights that they were trained on, tensor by tensor."""
