"""`python -m meshwright.compat.deepspeed script.py …`."""

from meshwright.compat.deepspeed.launcher import main

if __name__ == "__main__":
    main()
