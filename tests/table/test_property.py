"""Random call sequences of a store against the dictionary model of oracle.py: see store_machine.py."""

from store_machine import StoreMachine

TestStore = StoreMachine.TestCase
