//! What commands print, and how they fail.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write};

use serde::Serialize;

use crate::client::ClientError;

/// How a command ends when it does not succeed.
#[derive(Debug)]
pub(super) enum CliError {
    /// The reader of stdout is gone; nothing went wrong.
    Gone,
    /// Exit status 2.
    Usage(String),
    /// Exit status 1.
    Failed(String),
    /// The broker could not start or broke: its exit status and cause.
    Broke { status: u8, message: String },
}

impl CliError {
    pub(super) fn failed(message: impl Into<String>) -> CliError {
        CliError::Failed(message.into())
    }
}

impl From<ClientError> for CliError {
    fn from(error: ClientError) -> CliError {
        CliError::Failed(error.to_string())
    }
}

/// Writing to stdout failed.
impl From<io::Error> for CliError {
    fn from(error: io::Error) -> CliError {
        match error.kind() {
            ErrorKind::BrokenPipe => CliError::Gone,
            _ => CliError::Failed(format!("cannot write the output: {error}")),
        }
    }
}

/// Prints one line of text.
pub(super) fn line(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    Ok(())
}

/// Prints one JSON document on one line.
pub(super) fn json(value: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string(value)
        .map_err(|error| CliError::failed(format!("cannot write JSON: {error}")))?;
    line(&text)
}

/// Columns of text, aligned; numbers to the right.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(heads: &[&str]) -> Table {
        let heads = heads.iter().map(|head| (*head).to_owned()).collect();
        Table { rows: vec![heads] }
    }

    pub(super) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.len() <= 1
    }

    pub(super) fn text(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let column = |at: usize| self.rows.iter().filter_map(move |row| row.get(at));
        let widths: Vec<usize> = (0..columns)
            .map(|at| column(at).map(|cell| cell.chars().count()).max().unwrap_or(0))
            .collect();
        let right: Vec<bool> = (0..columns)
            .map(|at| {
                column(at)
                    .skip(1)
                    .all(|cell| cell == "-" || cell.parse::<f64>().is_ok())
            })
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&right) {
                // Writing to a string cannot fail.
                let _ = if *right {
                    write!(line, "{cell:>width$}  ")
                } else {
                    write!(line, "{cell:<width$}  ")
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    pub(super) fn print(&self) -> Result<(), CliError> {
        io::stdout().lock().write_all(self.text().as_bytes())?;
        Ok(())
    }
}

/// A number, or a dash.
pub(super) fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Items with commas between them.
pub(super) fn joined<T: ToString>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(ToString::to_string).collect();
    items.join(",")
}
