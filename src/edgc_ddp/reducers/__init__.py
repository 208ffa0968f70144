"""How one bucket becomes its average: dense, dense in fewer bits, sparse, or as low-rank factors."""
