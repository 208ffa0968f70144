"""How one bucket becomes its average: dense, or as low-rank factors."""
