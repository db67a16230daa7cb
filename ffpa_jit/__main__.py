"""`python -m ffpa_jit` is `ffpa-jit`."""

from ffpa_jit.cli import main

if __name__ == "__main__":
    main(prog_name="ffpa-jit")
