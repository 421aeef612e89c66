//! The plain in-memory model: what a partition must contain, and what a crash may have left of it.
//!
//! A partition is a list of changes in the order they were accepted. The first so many are acknowledged and so
//! certain; of the rest a prefix may survive a crash. Log start is a bound of its own, as retention moves it too.

use std::sync::Arc;

use ringfence_engine::store::LogSettings;
use ringfence_engine::types::PartitionId;

use super::Violation;

/// Identity of a batch of an idempotent producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sequence {
    /// Producer id.
    pub id: i64,
    /// Epoch of the id.
    pub epoch: i16,
    /// Sequence of the first record.
    pub first: i32,
    /// Sequence of the last record.
    pub last: i32,
}

/// One batch as the store must serve it.
#[derive(Debug, Clone)]
pub(super) struct Batch {
    /// Offset of the first record.
    pub base: u64,
    /// Offset after the last record.
    pub end: u64,
    /// The stamped bytes.
    pub bytes: Arc<[u8]>,
    /// Timestamp of all its records.
    pub time: i64,
    /// Who sent it, when it has an identity.
    pub sequence: Option<Sequence>,
}

/// One step of a partition's life.
#[derive(Debug, Clone)]
pub(super) enum Change {
    Append(Batch),
    Epoch(u32),
    Truncate(u64),
    Drop,
}

/// Content of a partition after some changes.
#[derive(Debug, Clone, Default)]
pub(super) struct State {
    /// All batches since the partition was made, also those below log start.
    pub batches: Vec<Batch>,
    /// Epochs and where they start, rising in both.
    pub epochs: Vec<(u32, u64)>,
    /// Next offset.
    pub end: u64,
    /// Dropped for good.
    pub dropped: bool,
    /// A truncation happened, so how much producers remember is not certain.
    pub truncated: bool,
}

impl State {
    fn apply(&mut self, change: &Change) {
        match change {
            Change::Append(batch) => {
                self.end = batch.end;
                self.batches.push(batch.clone());
            }
            Change::Epoch(epoch) => {
                // An epoch without records is replaced by the next one at the same place.
                self.epochs.retain(|(_, start)| *start < self.end);
                self.epochs.push((*epoch, self.end));
            }
            Change::Truncate(offset) => {
                self.batches.retain(|batch| batch.base < *offset);
                self.epochs.retain(|(_, start)| start < offset);
                self.end = self.batches.last().map_or(*offset, |batch| batch.end);
                self.truncated = true;
            }
            Change::Drop => self.dropped = true,
        }
    }

    /// The current leader epoch; 0 before the first.
    #[must_use]
    pub(super) fn epoch(&self) -> u32 {
        self.epochs.last().map_or(0, |(epoch, _)| *epoch)
    }

    /// The batch that contains `offset`.
    #[must_use]
    pub(super) fn batch_at(&self, offset: u64) -> Option<&Batch> {
        let index = self.batches.partition_point(|batch| batch.end <= offset);
        self.batches.get(index).filter(|batch| batch.base <= offset)
    }

    /// The newest batch of a producer id.
    #[must_use]
    pub(super) fn newest_of(&self, id: i64) -> Option<Sequence> {
        let sequences = self.batches.iter().rev().filter_map(|batch| batch.sequence);
        sequences.into_iter().find(|sequence| sequence.id == id)
    }
}

/// A change that is accepted and not acknowledged.
#[derive(Debug, Clone)]
struct Pending {
    change: Change,
    /// Token of the command whose answer acknowledges it; appends are acknowledged by the durable end.
    token: Option<u64>,
}

/// What a reopened store shows of a partition.
#[derive(Debug, Clone, Default)]
pub(super) struct Observed {
    /// Log start at first; retention may raise it during the check.
    pub first_start: u64,
    /// Log start that was known before the restart.
    pub known_start: u64,
    pub log_start: u64,
    pub log_end: u64,
    pub epoch: u32,
    /// Batches served from `log_start` on.
    pub batches: Vec<(u64, Arc<[u8]>)>,
    /// Ranges that were answered with a typed error.
    pub refused: Vec<(u64, u64)>,
    /// The store said that this partition is damaged.
    pub fenced: bool,
}

/// One partition.
#[derive(Debug, Clone)]
pub(super) struct Partition {
    pub id: PartitionId,
    pub name: String,
    pub settings: LogSettings,
    certain: State,
    pending: Vec<Pending>,
    /// With every pending change applied.
    pub state: State,
    /// Highest log start that was announced or answered.
    pub start_known: u64,
    /// Highest log start that was asked for.
    pub start_asked: u64,
    /// Highest durable end since the last truncation.
    pub durable: u64,
    /// Batches cut away in this life of the process, for reads that were under way.
    pub cut: Vec<Batch>,
    /// Set by faults that damage silently: content may be refused, never wrong.
    pub fence_seen: bool,
    /// Records may be damaged, and their times lost with them: such a segment goes when the one behind it is too old.
    pub may_lose_times: bool,
    /// Some of its records were lost to damage, and with them what the store knew of who sent them.
    pub damaged: bool,
}

impl Partition {
    /// A new, empty partition.
    #[must_use]
    pub(super) fn new(id: PartitionId, name: &str, settings: LogSettings) -> Partition {
        Partition {
            id,
            name: name.to_owned(),
            settings,
            certain: State::default(),
            pending: Vec::new(),
            state: State::default(),
            start_known: 0,
            start_asked: 0,
            durable: 0,
            cut: Vec::new(),
            fence_seen: false,
            may_lose_times: false,
            damaged: false,
        }
    }

    /// A change was accepted; `token` is that of the answer that will acknowledge it.
    pub(super) fn accept(&mut self, change: Change, token: Option<u64>) {
        if let Change::Truncate(offset) = change {
            let cut = self.state.batches.iter().filter(|batch| batch.base >= offset);
            self.cut.extend(cut.cloned());
            // A cut below the log start takes the log start along.
            self.start_known = self.start_known.min(offset);
        }
        self.state.apply(&change);
        self.pending.push(Pending { change, token });
    }

    /// The command behind `token` was refused: it never happened.
    pub(super) fn refuse(&mut self, token: u64) {
        self.pending.retain(|pending| pending.token != Some(token));
        self.state = self.certain.clone();
        self.pending
            .iter()
            .for_each(|pending| self.state.apply(&pending.change));
    }

    /// The answer to `token` came: everything up to its change is certain.
    pub(super) fn acknowledge(&mut self, token: u64) {
        let index = self.pending.iter().position(|p| p.token == Some(token));
        self.settle(index.map_or(0, |index| index + 1));
    }

    /// The durable end moved to `end`.
    pub(super) fn durable_to(&mut self, end: u64) -> Result<(), Violation> {
        if end < self.durable {
            let was = self.durable;
            return self.wrong(format!("durable end moved back from {was} to {end}"));
        }
        // Until a cut is answered, bytes above it may still become durable; bytes after it say nothing yet.
        let is_cut = |p: &Pending| matches!(p.change, Change::Truncate(_));
        let cut = self.pending.iter().position(is_cut);
        let before = &self.pending[..cut.unwrap_or(self.pending.len())];
        let end_of = |p: &Pending| match &p.change {
            Change::Append(batch) => Some(batch.end),
            _ => None,
        };
        let known = before.iter().rev().find_map(end_of).unwrap_or(self.certain.end);
        if end > known.max(self.state.end) {
            return self.wrong(format!("durable end {end} is beyond the log end {known}"));
        }
        self.durable = end;
        let covered = before.iter().rposition(|p| end_of(p).is_some_and(|e| e <= end));
        self.settle(covered.map_or(0, |index| index + 1));
        Ok(())
    }

    fn settle(&mut self, count: usize) {
        for pending in self.pending.drain(..count) {
            self.certain.apply(&pending.change);
            if let Change::Truncate(offset) = pending.change {
                self.durable = self.durable.min(offset);
            }
        }
    }

    /// Offsets acknowledged for sure, whatever the crash.
    #[cfg(test)]
    pub(super) fn certain_end(&self) -> u64 {
        self.certain.end
    }

    /// Whether everything accepted is acknowledged.
    #[must_use]
    pub(super) fn is_settled(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether the batches of a producer that the store must remember all lie above the log start. Of one of which
    /// nothing is left there, it cannot know what lay below.
    #[must_use]
    pub(super) fn holds_last_batches_of(&self, id: i64) -> bool {
        let start = self.start_known.max(self.start_asked);
        let own = self.state.batches.iter().rev();
        let own = own.filter(|batch| batch.sequence.is_some_and(|s| s.id == id));
        let mut own = own.take(5).map(|batch| batch.base >= start).peekable();
        start == 0 || (own.peek().is_some() && own.all(|above| above))
    }

    /// Whether a drop was asked for.
    #[must_use]
    pub(super) fn is_dropping(&self) -> bool {
        self.state.dropped
    }

    /// Log start moved by the store.
    pub(super) fn log_start_moved(&mut self, start: u64, wall_ms: i64) -> Result<(), Violation> {
        if start < self.start_known {
            let was = self.start_known;
            return self.wrong(format!("log start moved back from {was} to {start}"));
        }
        self.check_retention(start, wall_ms)?;
        self.start_known = start;
        Ok(())
    }

    /// Everything between the known log start and `start` must have been asked or allowed to go.
    fn check_retention(&self, start: u64, wall_ms: i64) -> Result<(), Violation> {
        let from = self.start_known.max(self.start_asked);
        if start <= from {
            return Ok(());
        }
        if start > self.state.end {
            let end = self.state.end;
            return self.wrong(format!("log start {start} is beyond the log end {end}"));
        }
        let (mut kept, mut old_behind) = (0, false);
        for batch in self.state.batches.iter().rev().take_while(|b| b.base >= from) {
            let age = wall_ms.saturating_sub(batch.time);
            let too_old = self
                .settings
                .retention_ms
                .is_some_and(|limit| age >= limit as i64);
            old_behind |= too_old;
            let too_old = too_old || (old_behind && self.may_lose_times);
            let too_much = self.settings.retention_bytes.is_some_and(|limit| kept >= limit);
            if batch.base < start && !too_old && !too_much && !self.state.truncated {
                let base = batch.base;
                return self.wrong(format!(
                    "log start {start} ({from} was asked for): retention took offset {base} at age {age} ms with {kept} \
                     bytes behind it"
                ));
            }
            kept += batch.bytes.len() as u64;
        }
        Ok(())
    }

    /// Takes in what a reopened store shows: some prefix of the unacknowledged changes must explain it. From then on
    /// all of it is certain.
    pub(super) fn adopt(&mut self, seen: &Observed, lenient: bool, wall_ms: i64) -> Result<(), Violation> {
        let mut reasons = Vec::new();
        for count in (0..=self.pending.len()).rev() {
            let mut state = self.certain.clone();
            self.pending[..count].iter().for_each(|p| state.apply(&p.change));
            match explains(&state, seen, lenient) {
                Ok(()) => return self.take_over(state, seen, wall_ms),
                Err(why) => reasons.push(why),
            }
        }
        let pending = self.pending.len();
        self.wrong(format!(
            "after reopening: start {} end {} epoch {}, explained by no prefix of {pending} unacknowledged changes; with \
             all of them: {}; with none: {}",
            seen.log_start,
            seen.log_end,
            seen.epoch,
            reasons.first().map_or("", String::as_str),
            reasons.last().map_or("", String::as_str),
        ))
    }

    fn take_over(&mut self, state: State, seen: &Observed, wall_ms: i64) -> Result<(), Violation> {
        let start = seen.first_start;
        let known = seen.known_start;
        if start < known.min(state.end) {
            return self.wrong(format!("log start {start} after reopening, {known} was known"));
        }
        self.damaged |= seen.fenced || !seen.refused.is_empty();
        self.certain = state.clone();
        self.state = state;
        self.pending.clear();
        self.cut.clear();
        self.check_retention(start, wall_ms)?;
        self.start_known = self.start_known.min(seen.log_start).max(start);
        self.start_asked = seen.log_start;
        self.durable = seen.log_end;
        Ok(())
    }

    /// A violation in this partition.
    pub(super) fn wrong<T>(&self, what: String) -> Result<T, Violation> {
        let trail: Vec<String> = self.pending.iter().map(|p| short(&p.change)).collect();
        Err(Violation(format!(
            "{} ({}): {what} [certain end {}, epochs {:?}; pending {}]",
            self.id,
            self.name,
            self.certain.end,
            self.certain.epochs,
            trail.join(" ")
        )))
    }
}

fn short(change: &Change) -> String {
    match change {
        Change::Append(batch) => format!("+{}..{}", batch.base, batch.end),
        Change::Epoch(epoch) => format!("e{epoch}"),
        Change::Truncate(offset) => format!("cut@{offset}"),
        Change::Drop => "drop".to_owned(),
    }
}

/// Where the refused ranges that begin at or below `next` end.
fn behind_refused(seen: &Observed, mut next: u64) -> u64 {
    while let Some((_, to)) = seen.refused.iter().find(|(from, to)| *from <= next && next < *to) {
        next = *to;
    }
    next
}

/// Whether `state` explains what was seen; else why not.
fn explains(state: &State, seen: &Observed, lenient: bool) -> Result<(), String> {
    if state.dropped {
        return Err("it was dropped".to_owned());
    }
    let damaged = lenient && (seen.fenced || !seen.refused.is_empty());
    if seen.log_end != state.end && !(damaged && seen.fenced) {
        return Err(format!("log end {} instead of {}", seen.log_end, state.end));
    }
    // A cut may take the last entry of a table whose older ones are gone (by the log start, or by the table's bound);
    // the next leader begins a new one.
    let emptied = state.truncated && seen.epoch == 0;
    if seen.epoch != state.epoch() && !damaged && !emptied {
        return Err(format!("epoch {} instead of {}", seen.epoch, state.epoch()));
    }
    let mut next = seen.log_start;
    for (base, bytes) in &seen.batches {
        next = behind_refused(seen, next);
        let Some(batch) = state.batch_at(*base).filter(|batch| batch.base == *base) else {
            return Err(format!("no batch begins at {base}"));
        };
        if batch.bytes != *bytes {
            return Err(format!("bytes of the batch at {base} differ"));
        }
        if *base > next {
            return Err(format!("a hole before offset {base}"));
        }
        next = batch.end;
    }
    if behind_refused(seen, next) < seen.log_end {
        return Err(format!("nothing served at {next} below the end {}", seen.log_end));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ringfence_engine::batch::TimestampType;
    use ringfence_engine::types::TopicId;

    use super::*;

    fn partition() -> Partition {
        let settings = LogSettings {
            segment_bytes: 1 << 20,
            segment_ms: u64::MAX,
            retention_bytes: None,
            retention_ms: None,
            max_message_bytes: 1 << 20,
            timestamp_type: TimestampType::CreateTime,
            memory: false,
        };
        let id = PartitionId {
            topic: TopicId([1; 16]),
            index: 0,
        };
        Partition::new(id, "t", settings)
    }

    fn append(base: u64, end: u64, byte: u8) -> Change {
        Change::Append(Batch {
            base,
            end,
            bytes: Arc::from([byte; 4].as_slice()),
            time: 0,
            sequence: None,
        })
    }

    fn observed(end: u64, epoch: u32, batches: &[(u64, u8)]) -> Observed {
        Observed {
            first_start: 0,
            log_end: end,
            epoch,
            batches: batches
                .iter()
                .map(|(base, byte)| (*base, Arc::from([*byte; 4].as_slice())))
                .collect(),
            ..Observed::default()
        }
    }

    /// Epoch 1, then batches 0..2 and 2..3, the first of them durable.
    fn two_batches() -> Partition {
        let mut p = partition();
        p.accept(Change::Epoch(1), Some(1));
        p.accept(append(0, 2, b'a'), None);
        p.accept(append(2, 3, b'b'), None);
        p.durable_to(2).unwrap();
        p
    }

    #[test]
    fn an_unacknowledged_suffix_may_go_and_nothing_else() {
        let check = |seen: Observed, fine: bool| {
            assert_eq!(two_batches().adopt(&seen, false, 0).is_ok(), fine, "{seen:?}");
        };
        check(observed(3, 1, &[(0, b'a'), (2, b'b')]), true);
        check(observed(2, 1, &[(0, b'a')]), true);
        check(observed(0, 1, &[]), false);
        check(observed(2, 0, &[(0, b'a')]), false);
        check(observed(2, 1, &[(0, b'x')]), false);
        check(observed(3, 1, &[(2, b'b')]), false);
        check(observed(3, 1, &[(0, b'a')]), false);
    }

    #[test]
    fn what_a_reopened_store_showed_is_certain_from_then_on() {
        let mut p = two_batches();
        p.adopt(&observed(3, 1, &[(0, b'a'), (2, b'b')]), false, 0)
            .unwrap();
        assert!(p.adopt(&observed(2, 1, &[(0, b'a')]), false, 0).is_err());
    }

    #[test]
    fn a_durable_end_before_a_cut_says_nothing_about_bytes_after_it() {
        let mut p = two_batches();
        p.accept(Change::Truncate(2), Some(2));
        p.accept(append(2, 3, b'c'), None);
        p.acknowledge(2);
        assert_eq!(p.certain_end(), 2);
        assert!(p.clone().adopt(&observed(2, 1, &[(0, b'a')]), false, 0).is_ok());
        p.durable_to(3).unwrap();
        assert!(p.clone().adopt(&observed(2, 1, &[(0, b'a')]), false, 0).is_err());
        let cut = observed(3, 1, &[(0, b'a'), (2, b'b')]);
        assert!(p.adopt(&cut, false, 0).is_err(), "the cut batch must not be back");
    }

    #[test]
    fn refused_commands_never_happened_and_ends_never_move_back() {
        let mut p = two_batches();
        p.accept(Change::Truncate(0), Some(9));
        p.refuse(9);
        assert_eq!(p.state.end, 3);
        p.durable_to(3).unwrap();
        assert!(p.durable_to(2).is_err() && p.durable_to(4).is_err());
    }

    #[test]
    fn retention_must_have_a_reason() {
        let p = two_batches();
        assert!(p.clone().log_start_moved(2, 0).is_err());
        let mut by_time = p.clone();
        by_time.settings.retention_ms = Some(100);
        assert!(by_time.clone().log_start_moved(2, 99).is_err());
        by_time.log_start_moved(2, 100).unwrap();
        assert!(by_time.log_start_moved(0, 100).is_err(), "it never moves back");
        let mut by_size = p.clone();
        by_size.settings.retention_bytes = Some(5);
        assert!(
            by_size.clone().log_start_moved(2, 0).is_err(),
            "4 bytes would be left"
        );
        by_size.settings.retention_bytes = Some(4);
        by_size.log_start_moved(2, 0).unwrap();
        let mut asked = p;
        asked.start_asked = 2;
        asked.log_start_moved(2, 0).unwrap();
    }

    #[test]
    fn damage_excuses_refusals_but_never_wrong_bytes() {
        let refused = |fenced, refused: &[(u64, u64)], batches: &[(u64, u8)]| Observed {
            refused: refused.to_vec(),
            fenced,
            ..observed(3, 1, batches)
        };
        let p = two_batches();
        assert!(
            p.clone()
                .adopt(&refused(false, &[(0, 2)], &[(2, b'b')]), true, 0)
                .is_ok()
        );
        assert!(
            p.clone()
                .adopt(&refused(false, &[(0, 2)], &[(2, b'x')]), true, 0)
                .is_err()
        );
        assert!(p.clone().adopt(&refused(false, &[(0, 1)], &[]), true, 0).is_err());
        assert!(
            p.clone()
                .adopt(&refused(false, &[], &[(2, b'b')]), true, 0)
                .is_err()
        );
    }
}
