//! A figure beside its reference of the same run, and how figures are printed.

use std::fmt;

use serde::Serialize;

use crate::host::Host;

/// What a figure should reach.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    AtLeast(f64),
    AtMost(f64),
}

impl Target {
    /// Whether `value` reaches it.
    #[must_use]
    pub fn is_met_by(self, value: f64) -> bool {
        match self {
            Target::AtLeast(limit) => value >= limit,
            Target::AtMost(limit) => value <= limit,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::AtLeast(limit) => write!(f, ">= {limit}"),
            Target::AtMost(limit) => write!(f, "<= {limit}"),
        }
    }
}

/// One line of a report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// What was measured.
    pub name: String,
    /// The measurement, in words with unit.
    pub measured: String,
    /// What it is compared with, from the same run; empty for absolute figures.
    pub reference: String,
    /// Measurement by reference, or the measurement itself in the target's unit.
    pub value: f64,
    /// What `value` should reach.
    pub target: Option<Target>,
    /// Everything else worth knowing.
    pub notes: Vec<String>,
}

impl Figure {
    fn verdict(&self) -> &'static str {
        match self.target {
            None => "",
            Some(target) if target.is_met_by(self.value) => "reached",
            Some(_) => "MISSED",
        }
    }

    fn target_text(&self) -> String {
        self.target.map_or_else(String::new, |target| target.to_string())
    }
}

/// Figures of one run on one host.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Where.
    pub host: Host,
    /// What.
    pub figures: Vec<Figure>,
}

impl Report {
    /// A table for a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text: String = self.host.lines().iter().map(|line| format!("{line}\n")).collect();
        for figure in &self.figures {
            let Figure {
                name,
                measured,
                reference,
                value,
                notes,
                ..
            } = figure;
            text += &format!("\n{name}\n  {measured}\n");
            if !reference.is_empty() {
                text += &format!("  beside {reference}\n");
            }
            text += &format!("  {value:.3} {} {}\n", figure.target_text(), figure.verdict());
            for note in notes {
                text += &format!("  {note}\n");
            }
        }
        text
    }

    /// The same as a page of Markdown.
    #[must_use]
    pub fn markdown(&self, title: &str) -> String {
        let mut text = format!("# {title}\n\n");
        for line in self.host.lines() {
            text += &format!("- {line}\n");
        }
        text += "\n| figure | measured | beside, in the same run | value | target | |\n|---|---|---|---|---|---|\n";
        for figure in &self.figures {
            let Figure {
                name,
                measured,
                reference,
                value,
                ..
            } = figure;
            let (target, verdict) = (figure.target_text(), figure.verdict());
            text += &format!("| {name} | {measured} | {reference} | {value:.3} | {target} | {verdict} |\n");
        }
        text += "\n## Notes\n";
        for figure in self.figures.iter().filter(|figure| !figure.notes.is_empty()) {
            text += &format!("\n**{}**\n\n", figure.name);
            for note in &figure.notes {
                text += &format!("- {note}\n");
            }
        }
        text
    }

    /// The same for programs.
    #[must_use]
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers and strings can always be written as JSON")
    }

    /// Prints the table, or JSON.
    pub fn print(&self, json: bool) {
        if json {
            println!("{}", self.json());
        } else {
            print!("{}", self.text());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_target_is_said() {
        let figure = |value| Figure {
            name: "ratio".into(),
            measured: "1 MB/s".into(),
            reference: "device 2 MB/s".into(),
            value,
            target: Some(Target::AtLeast(0.45)),
            notes: vec!["a note".into()],
        };
        let report = Report {
            host: Host::of(std::path::Path::new("/proc")),
            figures: vec![figure(0.5), figure(0.4)],
        };
        let page = report.markdown("t");
        assert!(page.contains("| 0.500 | >= 0.45 | reached |"), "{page}");
        assert!(page.contains("| 0.400 | >= 0.45 | MISSED |"), "{page}");
        assert!(report.text().contains("MISSED") && report.json().contains("\"at_least\""));
    }
}
