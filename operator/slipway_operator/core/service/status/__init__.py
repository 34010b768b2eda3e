"""The status of a service: conditions, problems, events, service levels and cost. Pure.

Who reports a cause, and what it becomes. The table of all reasons with who can help and the remedy is
`slipway_api.vocabulary`, from which docs/api.md is made.

| reported by                          | judged by        | becomes                                                |
|--------------------------------------|------------------|--------------------------------------------------------|
| the API server: a refused write      | `refusals`       | Stalled; transient ones are named in Ready             |
| the scheduler: PodScheduled=False    | `placement`      | Stalled, or Ready=Unknown WaitingForGPU, Unschedulable |
| the kubelet: states of containers    | `problems`       | Stalled, or a sentence in Ready                        |
| the kubelet: events about volumes    | `mounts`         | Stalled or Ready=Unknown MountFailed                   |
| the runtime: its termination message | `problems`       | Stalled with the reason that it names                  |
| the runtime: 401 to the operator     | `scaling_status` | ScalingActive=False KeyRefused                         |
| the gateways: no report              | `route`          | RouteReady=False NoGateway                             |
| names of other objects               | `route`          | RouteReady, Ready and Stalled NameConflict             |
| time: progressDeadlineSeconds        | `conditions`     | Stalled ProgressDeadlineExceeded                       |

`conditions` also decides whether a cause keeps every replica from starting: then RouteReady is False with CannotStart,
and the gateway refuses requests immediately. `events` posts one event for each new reason of a condition.
"""
