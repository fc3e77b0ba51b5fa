//! A TURN client as a state machine.
