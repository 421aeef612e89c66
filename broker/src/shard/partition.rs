//! A partition on its shard: role, leader, acknowledgements that wait.

use std::collections::VecDeque;

use ringfence_engine::types::Offset;

use crate::native::Acks;
use crate::replica::leader::Leader;

/// What the shard is to a partition. Legal predecessors: Opening begins, and follows Leading or Failed when a newer
/// epoch is ordered; Leading follows Opening; Failed follows Opening; Dropping follows any. Set only by
/// [`Partition::enter`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Its leader epoch is on its way to the journal.
    Opening,
    /// Its leader epoch is durable; it serves.
    Leading,
    /// Its leader epoch could not be made durable.
    Failed,
    /// Its drop is on its way to the journal.
    Dropping,
}

/// A batch that waits for its acknowledgement: its end, its produce task and its place there.
type Parked = (Offset, u64, u32);

/// A partition of this shard.
#[derive(Debug)]
pub(super) struct Partition {
    slot: u32,
    role: Role,
    leader: Option<Leader>,
    /// Waiting for the leader's own counted end (acks=1), by end.
    on_leader: VecDeque<Parked>,
    /// Waiting for the high watermark (acks=all), by end.
    on_all: VecDeque<Parked>,
}

impl Partition {
    /// A partition under the number `slot`, whose epoch is not durable yet.
    pub(super) fn opening(slot: u32) -> Partition {
        Partition {
            slot,
            role: Role::Opening,
            leader: None,
            on_leader: VecDeque::new(),
            on_all: VecDeque::new(),
        }
    }

    /// The number that parked fetches know it by.
    pub(super) fn slot(&self) -> u32 {
        self.slot
    }

    pub(super) fn role(&self) -> Role {
        self.role
    }

    pub(super) fn leader(&self) -> Option<&Leader> {
        self.leader.as_ref()
    }

    pub(super) fn leader_mut(&mut self) -> Option<&mut Leader> {
        self.leader.as_mut()
    }

    /// Moves to another role.
    pub(super) fn enter(&mut self, role: Role) {
        let legal = matches!(
            (self.role, role),
            (Role::Opening, Role::Leading | Role::Failed)
                | (Role::Leading | Role::Failed, Role::Opening)
                | (_, Role::Dropping)
        );
        assert!(legal, "partition may not go from {:?} to {role:?}", self.role);
        self.role = role;
    }

    /// The epoch is durable: leads from now on.
    pub(super) fn lead(&mut self, leader: Leader) {
        self.enter(Role::Leading);
        self.leader = Some(leader);
    }

    /// Parks a batch that ends at `end` until it may be acknowledged.
    pub(super) fn park(&mut self, acks: Acks, end: Offset, task: u64, part: u32) {
        let queue = match acks {
            Acks::All => &mut self.on_all,
            Acks::Leader | Acks::None => &mut self.on_leader,
        };
        // Ends rise, but for retries of batches that are still waiting.
        let at = queue.partition_point(|(other, ..)| *other <= end);
        queue.insert(at, (end, task, part));
    }

    /// Takes out every batch whose acknowledgement is due.
    pub(super) fn acknowledge(&mut self) -> Vec<(u64, u32)> {
        let Some(leader) = &self.leader else {
            return Vec::new();
        };
        let mut due = Vec::new();
        for (acks, queue) in [(Acks::Leader, &mut self.on_leader), (Acks::All, &mut self.on_all)] {
            let end = leader.acknowledged(acks);
            let count = queue.partition_point(|(waiting, ..)| *waiting <= end);
            due.extend(queue.drain(..count).map(|(_, task, part)| (task, part)));
        }
        due
    }

    /// Takes out every batch that waits.
    pub(super) fn take_parked(&mut self) -> Vec<(u64, u32)> {
        let all = self.on_leader.drain(..).chain(self.on_all.drain(..));
        all.map(|(_, task, part)| (task, part)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TopicSettings;
    use ringfence_engine::types::LeaderEpoch;

    #[test]
    fn batches_are_acknowledged_by_their_end_not_by_their_arrival() {
        let mut partition = Partition::opening(0);
        partition.lead(Leader::new(
            LeaderEpoch(1),
            Offset(0),
            Offset(0),
            &TopicSettings::default(),
        ));
        partition.park(Acks::All, Offset(5), 1, 0);
        partition.park(Acks::All, Offset(9), 2, 0);
        partition.park(Acks::All, Offset(5), 3, 1);
        partition.park(Acks::Leader, Offset(7), 4, 0);
        assert!(partition.acknowledge().is_empty());
        partition.leader_mut().unwrap().durable(Offset(5));
        assert_eq!(partition.acknowledge(), [(1, 0), (3, 1)]);
        partition.leader_mut().unwrap().durable(Offset(8));
        assert_eq!(partition.acknowledge(), [(4, 0)]);
        assert_eq!(partition.take_parked(), [(2, 0)]);
    }

    #[test]
    #[should_panic(expected = "may not go")]
    fn a_dropped_partition_never_leads_again() {
        let mut partition = Partition::opening(0);
        partition.enter(Role::Dropping);
        partition.enter(Role::Leading);
    }
}
