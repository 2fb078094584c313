"""What a training run is made of, one matter a file; ``rwkv_clip.train`` puts them together."""
