"""The paper's figures and tables re-made, one module each: ``make(folder) -> lines for the record``."""
