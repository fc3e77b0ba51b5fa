//! Questions on a terminal, each with its default. Without a terminal the defaults apply.

use std::{
    fmt::Display,
    io::{self, BufRead, Write},
    str::FromStr,
};

use crate::setup::error::SetupError;

pub(crate) struct Dialogue<'a> {
    /// `None` without a terminal.
    input: Option<&'a mut dyn BufRead>,
    output: &'a mut dyn Write,
}

impl<'a> Dialogue<'a> {
    pub(crate) fn new(input: Option<&'a mut dyn BufRead>, output: &'a mut dyn Write) -> Self {
        Self { input, output }
    }

    pub(crate) fn is_interactive(&self) -> bool {
        self.input.is_some()
    }

    /// Returns the flag's value, or else asks the question until the answer is valid.
    pub(crate) fn answer<T: FromStr<Err: Display> + Display>(
        &mut self,
        flag: Option<T>,
        question: &str,
        default: T,
    ) -> Result<T, SetupError> {
        match flag {
            Some(value) => Ok(value),
            None => self.ask(question, default).map_err(SetupError::Dialogue),
        }
    }

    fn ask<T: FromStr<Err: Display> + Display>(&mut self, question: &str, default: T) -> io::Result<T> {
        let Some(input) = &mut self.input else { return Ok(default) };
        loop {
            write!(self.output, "{question} [{default}]: ")?;
            self.output.flush()?;
            let mut line = String::new();
            if input.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match line.trim() {
                "" => return Ok(default),
                answer => match answer.parse() {
                    Ok(value) => return Ok(value),
                    Err(why) => writeln!(self.output, "{why}")?,
                },
            }
        }
    }

    /// Asks for confirmation; without a terminal, the answer is no.
    pub(crate) fn confirm(&mut self, question: &str) -> Result<bool, SetupError> {
        Ok(self.is_interactive() && self.answer(None, question, YesNo::Yes)? == YesNo::Yes)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum YesNo {
    Yes,
    No,
}

impl FromStr for YesNo {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "yes" | "y" => Ok(Self::Yes),
            "no" | "n" => Ok(Self::No),
            _ => Err("expected yes or no"),
        }
    }
}

impl Display for YesNo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Self::Yes { "yes" } else { "no" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(typed: &str) -> (Result<u16, SetupError>, String) {
        let (mut input, mut output) = (typed.as_bytes(), Vec::new());
        let found = Dialogue::new(Some(&mut input), &mut output).answer(None, "Port", 443);
        (found, String::from_utf8(output).expect("text"))
    }

    #[test]
    fn an_empty_answer_is_the_default() {
        let (found, shown) = asked("\n");
        assert_eq!((found.ok(), shown.as_str()), (Some(443), "Port [443]: "));
    }

    #[test]
    fn the_question_is_repeated_after_an_invalid_answer() {
        let (found, shown) = asked("x\n 80 \n");
        assert_eq!(found.ok(), Some(80));
        assert_eq!(shown.matches("Port [443]: ").count(), 2, "{shown}");
        assert!(shown.contains("invalid digit"), "{shown}");
    }

    #[test]
    fn the_end_of_input_is_an_error() {
        assert!(asked("").0.is_err_and(|error| error.to_string().contains("answer with flags")));
    }

    #[test]
    fn nothing_is_asked_with_a_flag_or_without_a_terminal() {
        let mut output = Vec::new();
        let mut dialogue = Dialogue::new(None, &mut output);
        assert_eq!(dialogue.answer(None, "Port", 443).ok(), Some(443));
        assert_eq!(dialogue.answer(Some(80), "Port", 443).ok(), Some(80));
        assert_eq!(dialogue.confirm("Start").ok(), Some(false));
        let mut typed = "n\n".as_bytes();
        let mut dialogue = Dialogue::new(Some(&mut typed), &mut output);
        assert_eq!(dialogue.answer(Some(80), "Port", 443).ok(), Some(80));
        assert_eq!(dialogue.confirm("Start").ok(), Some(false));
        assert_eq!(output, b"Start [yes]: ");
    }
}
