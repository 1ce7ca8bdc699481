"""Autocast: a table gives each primitive of JAX a precision, and a jaxpr is rewritten accordingly.

| file | does |
| --- | --- |
| `transform.py` | traces a call, and runs the rewritten program |
| `flax_objects.py` | returns what a traced function writes to modules of Flax NNX |
| `names.py` | maps the names in a table to primitives, and says what no module matches |
| `module_scopes.py` | names the modules of Flax NNX and Equinox |
| `settings.py` | finds the rule of an equation in its module |
| `rewriting.py` | places casts |
| `gradients.py` | has each use of a cast hand its cotangent on in float32 |
| `products.py` | the primitives for that |
| `rules.py` | chooses the precision of an ordinary operator |
| `structured.py` | enters loops, branches and custom derivatives |
| `lookahead.py` | finds out how the rest of a program uses a value |
| `precision.py` | names the precisions, and the products that ask for one |
| `counting.py` | counts casts, and what they cost |
"""
