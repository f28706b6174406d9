"""From PyTorch graphs to Plans and back: what ``codetta.compile`` does."""
