"""The ground floor: pure values that every other room shares. No torch, no pyarrow, no input or output."""
