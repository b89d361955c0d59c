"""The training of one arm: the loop, and the parts it is made of."""
