// SPDX-License-Identifier: Apache-2.0

package config

import "fmt"

// ReloadableFrom tells whether a running balancer can take on b without a restart. The error is of
// type Errors and names each field that cannot change, with the value asked for and the running one.
func (b *Balancer) ReloadableFrom(old *Balancer) error {
	var fixed Errors
	fixed = fixed.unchanged("node.instance", b.Node.Instance, old.Node.Instance)
	fixed = fixed.unchanged("node.interface", b.Node.Interface, old.Node.Interface)
	fixed = fixed.unchanged("node.inside", b.Node.Inside, old.Node.Inside)
	fixed = fixed.unchanged("node.internal", b.Node.IsInternal(), old.Node.IsInternal())
	fixed = fixed.unchanged("node.seed", b.Node.Seed, old.Node.Seed)
	fixed = fixed.unchanged("node.limits.flows", b.Node.Limits.Flows, old.Node.Limits.Flows)
	fixed = fixed.unchanged("node.limits.servers", b.Node.Limits.Servers, old.Node.Limits.Servers)
	fixed = fixed.unchanged("metrics.listen", b.Metrics.Listen, old.Metrics.Listen)
	return fixed.orNil()
}

// ReloadableFrom tells whether a running agent can take on a without a restart, as that of
// Balancer does.
func (a *Agent) ReloadableFrom(old *Agent) error {
	var fixed Errors
	fixed = fixed.unchanged("node.instance", a.Node.Instance, old.Node.Instance)
	fixed = fixed.unchanged("node.interface", a.Node.Interface, old.Node.Interface)
	fixed = fixed.unchanged("node.internal", a.Node.IsInternal(), old.Node.IsInternal())
	fixed = fixed.unchanged("metrics.listen", a.Metrics.Listen, old.Metrics.Listen)
	return fixed.orNil()
}

// unchanged appends a problem if a field differs from its running value.
func (e Errors) unchanged(path string, value, running any) Errors {
	if value == running {
		return e
	}
	return append(e, &Error{
		Path:    path,
		Value:   fmt.Sprint(value),
		Problem: fmt.Sprintf("a change from %q needs a restart", fmt.Sprint(running)),
	})
}
