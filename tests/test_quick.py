"""What a quicker start leaves as it was."""

import subprocess
import sys
from importlib.util import find_spec

CODE = """
import sys
from kvlab import quick, views
import altair, jsonschema
assert "rfc3987_syntax" not in sys.modules  # neither read nor in the way of who wants it
from importlib.util import find_spec
print(find_spec("rfc3987_syntax") is not None)
checker = jsonschema.FormatChecker()
assert checker.conforms("1.2.3.4", "ipv4") and not checker.conforms("1.2.3", "ipv4")
"""


def test_charts_come_without_a_grammar_of_iris_and_nothing_else_is_gone():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(find_spec("rfc3987_syntax") is not None)
