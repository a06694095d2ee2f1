"""Floor 1: drafters behind one protocol, and the losses that train them."""
