"""The roof: what people touch. Only here do capture, storage and analysis meet."""
