"""`python -m meshwright.compat.horovod -np 2 script.py` runs a Horovod script as it is."""

from meshwright.compat.horovod.launcher.command import main

if __name__ == "__main__":
    main()
