"""`python -m validation.fuzz --programs N --seed S` draws programs, runs them and prints how they ended."""

from validation.fuzz.command import main

if __name__ == "__main__":
    main()
