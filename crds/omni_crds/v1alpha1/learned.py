"""What the autoscaler has learned of a pipeline and keeps over a restart. Whole numbers, with their unit in the name.

Written and read by the operator alone. Who reads checks everything again: an object may come from another version, or
from somebody else's hand.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from omni_crds.v1alpha1.base import Count, OmniModel, StageName
from omni_crds.v1alpha1.conditions import TIMESTAMP
from omni_crds.v1alpha1.markers import ListAtomic, ListMap

LEARNED_VERSION = 1  # of the meaning of the fields; another one is not read
REMEMBERED_MINUTES = 30

Amount = Annotated[int, Field(ge=0, le=1_000_000_000_000)]  # an hour in nanoseconds is below it


class LearnedStage(OmniModel):
    """What the replicas of one stage have shown. A unit of work is a token, a codec frame or a chunk."""

    name: StageName
    """Name of the stage; of stages that share pods, the leader."""
    learned_for: Annotated[str, Field(max_length=16, pattern=r"^[0-9a-f]*$")] = ""
    """Hash of model, engine, its settings, devices and edges. Where it is another one now, nothing of this is used."""
    requests_per_hour: Count = 0
    """What one replica bears alone: until its slots are taken, or its own share of TTFP fills the objective. Averaged."""
    reserve_thousandths: Amount = 0
    """Replicas kept beyond the load, per root of the load in replicas, times 1000. Late answers raise it."""
    law_windows: Count = 0
    """Windows behind requestsPerHour; from 100 on, the number of replicas follows from it and the reserve."""
    judged_windows: Count = 0
    """Windows whose late answers the reserve has been learned from. With any, that law goes on where lawWindows starts anew."""
    usual_requests_per_hour: Amount = 0
    """Requests that needed the stage, while there were any. What is seen with more requests than usual counts more."""
    usual_windows: Count = 0
    """Windows behind usualRequestsPerHour: at most those of a day."""
    bursty_thousandths: Amount = 0
    """Share of the requests of the last hours that came in bursts with gaps, times 1000. Above 500, requestsPerHour and the reserve have no say."""
    windows: Count = 0
    """Measurements behind the step time, old ones counted less."""
    batch_thousandths: Amount = 0
    """Mean requests that a replica worked on at once, times 1000."""
    batch_spread_thousandths: Amount = 0
    """Standard deviation of that, times 1000."""
    step_nanoseconds: Amount = 0
    """Time that one unit of work takes a request at the mean batch."""
    slope_nanoseconds: Amount = 0
    """Longer by so much for each further request of the batch, as far as the batch has varied."""
    work_thousandths: Amount = 0
    """Units of work per request, times 1000."""
    first_thousandths: Amount = 0
    """Computing share of the time to first packet, in step times, times 1000."""
    wait_microseconds: Amount = 0
    """Waiting share of the time to first packet, per squared batch."""
    transfer_microseconds: Amount = 0
    """Time to first packet that goes into handing over to the next stage."""
    computing_microseconds: Amount = 0
    """Mean computing share of the time to first packet."""
    computing_spread_microseconds: Amount = 0
    """95th percentile of that, less the mean."""
    waiting_microseconds: Amount = 0
    """Mean waiting share of the time to first packet."""
    waiting_spread_microseconds: Amount = 0
    """95th percentile of that, less the mean."""
    healthy_microseconds: Amount = 0
    """Share of the time to first packet while the objective held."""
    pace_nanoseconds: Amount = 0
    """Time per unit of work while the objective held."""
    idle_microseconds: Amount = 0
    """Time that a request is bound to a replica which does not compute for it."""
    cold_start_seconds: Annotated[tuple[Count, ...], Field(max_length=20), ListAtomic()] = ()
    """From creation to ready, of the last replicas that became ready."""
    caution_thousandths: Amount = 1000
    """Factor on the predicted share of this stage, times 1000: above 1000 after misses that the model did not expect."""
    arrivals_per_minute: Annotated[tuple[Count, ...], Field(max_length=REMEMBERED_MINUTES), ListAtomic()] = ()
    """Requests that needed this stage in each of the last minutes, newest last: the bursts that are remembered."""


class LearnedCapacity(OmniModel):
    """What was learned of a pipeline by measuring it. A restarted operator starts from it instead of from guesses."""

    version: Count
    """Of the meaning of these fields; the operator does not read what another version wrote."""
    time: Annotated[str, Field(min_length=20, max_length=27, pattern=TIMESTAMP)]
    """When it was written, in UTC. The older, the less it counts; after 14 days nothing of it is used."""
    ratio_thousandths: Amount = 1000
    """Measured over predicted 95th percentile of the time to first packet, times 1000."""
    stages: Annotated[tuple[LearnedStage, ...], Field(max_length=16), ListMap(("name",))] = ()
    """One entry per stage of which enough was seen."""
