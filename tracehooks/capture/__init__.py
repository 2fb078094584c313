"""A live model becomes rows: hooks that watch, a session that counts steps, a recorder that keeps what was measured."""
