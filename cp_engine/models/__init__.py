"""`transformers` models on packed trees."""
