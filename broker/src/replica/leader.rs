//! The leader of a partition: which bytes count, where the high watermark stands, what may be acknowledged.
//!
//! `high_watermark` is the minimum of the counted ends over the in-sync replicas and never moves back within an
//! epoch. With one replica that is the leader's own counted end: `durable_end`, or `accepted_end` where the topic
//! chose `durability=memory`. It is frozen while fewer replicas are in sync than `min.insync.replicas`
//! (REPLICATION.md section 3).

use ringfence_engine::types::{LeaderEpoch, Offset};

use crate::config::{Durability, TopicSettings};
use crate::error::WireError;
use crate::native::Acks;

/// Replicas in sync on a single node: the leader.
const IN_SYNC: u32 = 1;

/// What the leader of a partition knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leader {
    epoch: LeaderEpoch,
    durability: Durability,
    min_insync: u32,
    accepted_end: Offset,
    durable_end: Offset,
    high_watermark: Offset,
}

impl Leader {
    /// A leader that begins with a log of which everything below `durable_end` is synced.
    #[must_use]
    pub fn new(epoch: LeaderEpoch, log_end: Offset, durable_end: Offset, settings: &TopicSettings) -> Leader {
        let mut leader = Leader {
            epoch,
            durability: settings.durability,
            min_insync: settings.min_insync_replicas,
            accepted_end: log_end,
            durable_end: durable_end.min(log_end),
            high_watermark: durable_end.min(log_end),
        };
        leader.advance();
        leader
    }

    /// Its epoch.
    #[must_use]
    pub fn epoch(&self) -> LeaderEpoch {
        self.epoch
    }

    /// Exclusive end of what consumers see.
    #[must_use]
    pub fn high_watermark(&self) -> Offset {
        self.high_watermark
    }

    /// Exclusive end of what is in the log.
    #[must_use]
    pub fn accepted_end(&self) -> Offset {
        self.accepted_end
    }

    /// Whether acknowledgements may run ahead of the journal.
    #[must_use]
    pub fn is_memory(&self) -> bool {
        self.durability == Durability::Memory
    }

    /// Takes changed topic settings over; true when the high watermark moved.
    pub fn alter(&mut self, settings: &TopicSettings) -> bool {
        self.durability = settings.durability;
        self.min_insync = settings.min_insync_replicas;
        self.advance()
    }

    /// The log grew to `end`; true when the high watermark moved.
    pub fn accepted(&mut self, end: Offset) -> bool {
        self.accepted_end = self.accepted_end.max(end);
        self.advance()
    }

    /// The journal holds everything below `end`; true when the high watermark moved.
    pub fn durable(&mut self, end: Offset) -> bool {
        self.durable_end = self.durable_end.max(end);
        self.accepted_end = self.accepted_end.max(end);
        self.advance()
    }

    /// Whether a batch with these acks may be appended now.
    ///
    /// # Errors
    /// `NotEnoughReplicas` for acks=all while too few replicas are in sync.
    pub fn admit(&self, acks: Acks) -> Result<(), WireError> {
        if acks == Acks::All && IN_SYNC < self.min_insync {
            return Err(WireError::NotEnoughReplicas);
        }
        Ok(())
    }

    /// Everything below this end is acknowledged at this level.
    #[must_use]
    pub fn acknowledged(&self, acks: Acks) -> Offset {
        match acks {
            Acks::None => self.accepted_end,
            Acks::Leader => self.counted_end(),
            Acks::All => self.high_watermark,
        }
    }

    /// Compares the epoch a requester knows with the leader's.
    ///
    /// # Errors
    /// `FencedLeaderEpoch` when the requester's is older, `UnknownLeaderEpoch` when it is newer.
    pub fn check_epoch(&self, asked: Option<LeaderEpoch>) -> Result<(), WireError> {
        match asked {
            Some(asked) if asked < self.epoch => Err(WireError::FencedLeaderEpoch),
            Some(asked) if asked > self.epoch => Err(WireError::UnknownLeaderEpoch),
            _ => Ok(()),
        }
    }

    fn counted_end(&self) -> Offset {
        match self.durability {
            Durability::Sync => self.durable_end,
            Durability::Memory => self.accepted_end,
        }
    }

    fn advance(&mut self) -> bool {
        let before = self.high_watermark;
        if IN_SYNC >= self.min_insync {
            self.high_watermark = before.max(self.counted_end());
        }
        self.high_watermark > before
    }
}

/// Where a requester's log parts from the leader's, if it does: its last record has epoch `last`, its end is
/// `offset`; the leader's largest epoch not above `last` is `own`, which ends at `end`.
#[must_use]
pub fn divergence(
    last: LeaderEpoch,
    offset: Offset,
    (own, end): (LeaderEpoch, Offset),
) -> Option<(LeaderEpoch, Offset)> {
    (own < last || end < offset).then_some((own, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(durability: Durability, min_insync_replicas: u32) -> TopicSettings {
        TopicSettings {
            durability,
            min_insync_replicas,
            ..TopicSettings::default()
        }
    }

    #[test]
    fn the_watermark_follows_what_is_synced() {
        let mut leader = Leader::new(
            LeaderEpoch(3),
            Offset(10),
            Offset(8),
            &settings(Durability::Sync, 1),
        );
        assert_eq!(leader.high_watermark(), Offset(8));
        assert!(!leader.accepted(Offset(20)));
        assert!(leader.durable(Offset(15)));
        assert!(!leader.durable(Offset(12)));
        let ends = [Acks::None, Acks::Leader, Acks::All].map(|acks| leader.acknowledged(acks));
        assert_eq!(ends, [Offset(20), Offset(15), Offset(15)]);
    }

    #[test]
    fn memory_topics_count_what_is_accepted_and_never_move_back() {
        let mut leader = Leader::new(
            LeaderEpoch(3),
            Offset(0),
            Offset(0),
            &settings(Durability::Memory, 1),
        );
        assert!(leader.accepted(Offset(5)));
        assert!(!leader.alter(&settings(Durability::Sync, 1)));
        assert_eq!(leader.high_watermark(), Offset(5));
        assert_eq!(leader.acknowledged(Acks::Leader), Offset(0));
        assert!(!leader.durable(Offset(4)));
        assert!(leader.durable(Offset(6)));
    }

    #[test]
    fn too_few_replicas_freeze_the_watermark_and_refuse_acks_all() {
        let mut leader = Leader::new(
            LeaderEpoch(3),
            Offset(5),
            Offset(5),
            &settings(Durability::Sync, 2),
        );
        assert_eq!(leader.admit(Acks::All), Err(WireError::NotEnoughReplicas));
        assert_eq!(leader.admit(Acks::Leader), Ok(()));
        assert!(!leader.durable(Offset(9)));
        assert_eq!(leader.acknowledged(Acks::Leader), Offset(9));
        assert!(leader.alter(&settings(Durability::Sync, 1)));
        assert_eq!(leader.high_watermark(), Offset(9));
    }

    #[test]
    fn epochs_are_fenced_both_ways() {
        let leader = Leader::new(
            LeaderEpoch(3),
            Offset(0),
            Offset(0),
            &settings(Durability::Sync, 1),
        );
        assert_eq!(leader.check_epoch(None), Ok(()));
        assert_eq!(leader.check_epoch(Some(LeaderEpoch(3))), Ok(()));
        assert_eq!(
            leader.check_epoch(Some(LeaderEpoch(2))),
            Err(WireError::FencedLeaderEpoch)
        );
        assert_eq!(
            leader.check_epoch(Some(LeaderEpoch(4))),
            Err(WireError::UnknownLeaderEpoch)
        );
    }

    #[test]
    fn logs_part_where_the_epoch_or_its_end_differs() {
        let own = (LeaderEpoch(3), Offset(10));
        assert_eq!(divergence(LeaderEpoch(3), Offset(10), own), None);
        assert_eq!(divergence(LeaderEpoch(3), Offset(11), own), Some(own));
        assert_eq!(divergence(LeaderEpoch(4), Offset(5), own), Some(own));
    }
}
