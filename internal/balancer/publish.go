// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"maps"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/rundir"
)

// PublishTo makes the balancer publish its events. Call it before Run.
func (b *Balancer) PublishTo(stream *events.Stream) { b.events = stream }

// ReportUntried makes the balancer tell why its host cannot check servers, at most every ten
// seconds. The function must not block. Call ReportUntried before Run.
func (b *Balancer) ReportUntried(report func(reason string)) { b.checker.ReportUntried(report) }

// ReportUnsaved makes the balancer tell why it cannot write to its directory of state. An empty
// text says that it can again. Call ReportUnsaved before Run.
func (b *Balancer) ReportUnsaved(report func(problem string)) { b.reportUnsaved = report }

// ReportReasons makes the balancer tell why servers are unfit, as often as it logs that. Call
// ReportReasons before Run.
func (b *Balancer) ReportReasons(report func([]rundir.ServerReason)) { b.reportReasons = report }

// mostReasons is the highest number of reasons that are told.
const mostReasons = 1000

// tellReasons passes the reasons why servers are unfit to the function of ReportReasons, if they
// have changed since the last call. It passes at most mostReasons, and none without a text.
func (b *Balancer) tellReasons() {
	if b.reportReasons == nil {
		return
	}
	var all []rundir.ServerReason
	for _, name := range slices.Sorted(maps.Keys(b.services.byName)) {
		for _, m := range b.services.byName[name].members {
			for _, cause := range b.services.causes(m).Each() {
				if why := m.reasons[cause].began; why != "" && len(all) < mostReasons {
					all = append(all, rundir.ServerReason{
						Service: name, Server: m.Name, Condition: string(inspect.ConditionOf(cause)), Reason: why,
					})
				}
			}
		}
	}
	if !slices.Equal(all, b.reported) {
		b.reported = all
		b.reportReasons(all)
	}
}

func (b *Balancer) publishAll() {
	for _, svc := range b.services.byName {
		b.publish(svc)
	}
}

// publish publishes which servers of a service have become unfit for new flows or fit again since
// the last call. If the service has lost its last fit server, or has one again, publish publishes
// that too.
func (b *Balancer) publish(svc *service) {
	fit := false
	for _, m := range svc.members {
		causes := b.services.causes(m)
		fit = fit || causes == 0 && m.Takes()
		if down := causes != 0; down != m.down {
			m.down = down
			kind := events.ServerUp
			if down {
				kind = events.ServerDown
			}
			b.events.Publish(events.Event{
				Kind: kind, Service: svc.Name, Server: m.Name, Reason: m.describe(causes),
			})
		}
	}
	if svc.down == !fit {
		return
	}
	svc.down = !fit
	kind := events.ServiceUp
	if svc.down {
		kind = events.ServiceDown
	}
	b.events.Publish(events.Event{Kind: kind, Service: svc.Name})
}

// describe names the causes with their reasons, as far as they are known.
func (m *member) describe(causes dataplane.Causes) string {
	var texts []string
	for _, cause := range causes.Each() {
		text := string(inspect.ConditionOf(cause))
		if why := m.reasons[cause].began; why != "" {
			text += " (" + why + ")"
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

// publishReload publishes a change of the desired state, the servers that it drains or undrains,
// and the servers whose flows are lost. The losses were computed before the change. Nothing is
// published if there are no changes. A loss is left out if its number of flows is 0 or unknown, or
// if its cause is LossForgotten.
func (b *Balancer) publishReload(
	diff *serviceDiff, losses []desired.Loss, changes desired.Changes, by string,
) {
	if len(changes) == 0 {
		return
	}
	b.events.Publish(events.Event{Kind: events.Changed, By: by, Changes: changes.Summary()})
	for i := range b.cfg.Services {
		s := &b.cfg.Services[i]
		if !diff.has(s.Name) {
			continue
		}
		servers := serversByName(diff.before[s.Name])
		for i := range s.Servers {
			now := &s.Servers[i]
			was := servers[now.Name]
			if was == nil || was.Takes() == now.Takes() {
				continue
			}
			kind := events.ServerUndrained
			if !now.Takes() {
				kind = events.ServerDraining
			}
			b.events.Publish(events.Event{Kind: kind, Service: s.Name, Server: now.Name, By: by})
		}
	}
	for _, loss := range losses {
		reason := ""
		switch loss.Cause {
		case desired.LossRemoved:
			reason = "the server was removed"
		case desired.LossMoved:
			reason = "the server got another address, or its service another VIP, port or protocol"
		case desired.LossNarrowed:
			reason = "the service gets fewer VIPs or ports: at most the flows of the others are lost"
		}
		if reason != "" && loss.Flows != nil && *loss.Flows > 0 {
			b.events.Publish(events.Event{
				Kind: events.FlowsLost, Service: loss.Service, Server: loss.Server, Flows: loss.Flows,
				Reason: reason,
			})
		}
	}
}

// publishDrained publishes which drained servers have no flow left, after a sweep.
func (b *Balancer) publishDrained() {
	for _, svc := range b.services.byName {
		for _, m := range svc.members {
			if m.Takes() {
				m.drained = false
				continue
			}
			if flows := b.liveFlows(svc, m); !m.drained && flows != nil && *flows == 0 {
				m.drained = true
				b.events.Publish(events.Event{Kind: events.ServerDrained, Service: svc.Name, Server: m.Name})
			}
		}
	}
}

// liveFlows returns the flows of a member at the last sweep, without closing ones. It returns
// nil if the service has no flow table, or if they were not counted yet.
func (b *Balancer) liveFlows(svc *service, m *member) *uint64 {
	counted, ok := b.plane.FlowCounts.Of(m.slot)
	if !ok || !svc.Persistence.Method().HasFlowTable {
		return nil
	}
	live := counted.Flows.Total() - counted.Flows.Closing + counted.HalfOpen.Total()
	return &live
}
