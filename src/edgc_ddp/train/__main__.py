"""``python -m edgc_ddp.train``, also what torchrun starts."""

from edgc_ddp.train.app import main

if __name__ == "__main__":
    main()
