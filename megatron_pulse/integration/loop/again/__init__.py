"""Parts of steps that are made once more, to see what is wrong with them."""
