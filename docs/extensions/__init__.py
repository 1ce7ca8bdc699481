"""What the documentation has beyond Sphinx: pages made from the code, so that they cannot differ from it."""
