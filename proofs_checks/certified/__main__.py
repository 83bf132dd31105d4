"""`python -m proofs_checks.certified`."""

import sys

from proofs_checks.certified.run import main

sys.exit(main())
