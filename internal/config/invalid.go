// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"errors"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// withStoredOverrides reads the file of overrides, and returns the files with those overrides that
// are valid. A change of the configuration file, or a newer build, can make an override invalid. A
// process must start nevertheless.
func (f *Files[D]) withStoredOverrides() (*Files[D], fieldpath.Errors) {
	overrides, stored, err := readOverrides(f.place)
	if err != nil {
		changed := *f
		changed.Invalid = []desired.InvalidOverride{{Problems: asProblems(err, f.place)}}
		return &changed, f.warnings
	}
	changed, warnings := f.WithValid(overrides)
	changed.Stored = stored
	return changed, append(f.warnings, warnings...)
}

// Unreadable tells whether the file of overrides could not be read as a list of overrides.
func (f *Files[D]) Unreadable() bool {
	return slices.ContainsFunc(f.Invalid, func(o desired.InvalidOverride) bool { return o.Service == "" })
}

// asProblems returns an error about a file as fieldpath.Errors that name the file.
func asProblems(err error, file string) fieldpath.Errors {
	var problems fieldpath.Errors
	if !errors.As(err, &problems) {
		problems.Addf("", "%s", err)
	}
	return problems.In(file)
}

// WithValid returns the files with those overrides that are valid together. The others are in
// Invalid, in the order of their lines. If an override sets a field with an error, WithValid leaves
// out this override. For an error in another field, it leaves out the one override that causes the
// error, or else all overrides of the service that cause it together.
func (f *Files[D]) WithValid(overrides []desired.Override) (changed *Files[D], warnings fieldpath.Errors) {
	var invalid []desired.InvalidOverride
	for { // each round leaves out at least one more
		changed, warnings, err := f.WithOverrides(overrides)
		if err == nil {
			slices.SortStableFunc(invalid, func(a, b desired.InvalidOverride) int {
				return cmp.Compare(a.Line, b.Line)
			})
			changed.Invalid = invalid
			return changed, warnings
		}
		wrong := f.culprits(overrides)
		if len(wrong) == 0 {
			wrong = f.suspects(overrides, asProblems(err, f.place))
		}
		var others []desired.Override
		for i, o := range overrides {
			if problems := wrong[i]; problems != nil {
				invalid = append(invalid, desired.InvalidOverride{Override: o, Problems: problems})
			} else {
				others = append(others, o)
			}
		}
		overrides = others
	}
}

// mostTried is how many overrides of one service are left out in turn to find the cause of an
// error. Each try reads all services, and a start must not take minutes.
const mostTried = 100

// suspects returns the overrides to leave out because of errors in fields that no override sets. It
// maps the index of each override to the errors that the override causes, which get its line.
//
// Overrides of a service and of its servers may be valid only together. So suspects first looks for
// a service without whose overrides there are fewer errors. Then it looks among these overrides for
// a single one without which there are fewer errors. If there is none, it returns all overrides of
// the service.
func (f *Files[D]) suspects(overrides []desired.Override, problems fieldpath.Errors) map[int]fieldpath.Errors {
	named := map[string]bool{} // services and servers that an error names
	for _, problem := range problems {
		target, _, _ := strings.Cut(problem.Path, ".")
		service, _, _ := strings.Cut(target, "/")
		named[target], named[service] = true, true
	}
	all := make([]int, len(overrides)) // indexes, the likeliest causes first
	for i := range all {
		all[i] = i
	}
	slices.Reverse(all) // among overrides of the same rank, the last one counts as the likeliest
	slices.SortStableFunc(all, func(a, b int) int {
		return cmp.Compare(rank(&overrides[a], named), rank(&overrides[b], named))
	})
	group, caused := f.firstCause(overrides, problems, byService(overrides, all))
	if len(caused) == 0 { // several services cause the error, for example if they exceed a limit
		group, caused = all[:1], problems
	}
	singles := slices.Collect(slices.Chunk(group[:min(len(group), mostTried)], 1))
	if single, causedByIt := f.firstCause(overrides, problems, singles); len(causedByIt) > 0 {
		group, caused = single, causedByIt
	}
	wrong := map[int]fieldpath.Errors{}
	for _, i := range group {
		wrong[i] = caused.AtLine(overrides[i].Line)
	}
	return wrong
}

// rank tells how likely an override causes errors that name the targets in named, 0 the likeliest:
//   - 0: an error names the target of the override
//   - 1: the target is any other service, which can conflict with the services that errors name
//   - 2: the target is any other server, which can conflict only with servers of its own service
func rank(o *desired.Override, named map[string]bool) int {
	switch {
	case named[o.Target()]:
		return 0
	case o.Server == "":
		return 1
	}
	return 2
}

// byService groups indexes of overrides by the services of the overrides.
func byService(overrides []desired.Override, list []int) (groups [][]int) {
	at := map[string]int{}
	for _, i := range list {
		service := overrides[i].Service
		if _, ok := at[service]; !ok {
			at[service] = len(groups)
			groups = append(groups, nil)
		}
		groups[at[service]] = append(groups[at[service]], i)
	}
	return groups
}

// firstCause returns the first group of overrides without which there are fewer errors, and the
// errors that are then gone. It returns nothing if there is no such group.
func (f *Files[D]) firstCause(
	overrides []desired.Override, problems fieldpath.Errors, groups [][]int,
) (group []int, caused fieldpath.Errors) {
	for _, group := range groups {
		var others []desired.Override
		for i, o := range overrides {
			if !slices.Contains(group, i) {
				others = append(others, o)
			}
		}
		var left fieldpath.Errors
		if _, _, err := f.WithOverrides(others); err != nil {
			left = asProblems(err, f.place)
		}
		if len(left) < len(problems) {
			return group, notAmong(problems, left)
		}
	}
	return nil, nil
}

// WithoutInvalid returns the files without those invalid overrides for which isGone is true, and a
// warning about each of these. It removes the lines from the problems of the other invalid
// overrides, because a change will write the file of overrides anew, with other lines.
func (f *Files[D]) WithoutInvalid(
	isGone func(*desired.InvalidOverride) bool,
) (others *Files[D], warnings fieldpath.Errors) {
	next := *f
	next.Invalid = nil
	for _, o := range f.Invalid {
		if isGone(&o) {
			warnings.Addf(o.Target(), "the invalid override is gone: %s", o.Does())
			continue
		}
		o.Line, o.Problems = 0, o.Problems.AtLine(0)
		next.Invalid = append(next.Invalid, o)
	}
	return &next, warnings
}

// culprits maps the index of each override that itself sets a field with an error to the errors.
func (f *Files[D]) culprits(overrides []desired.Override) map[int]fieldpath.Errors {
	wrong := map[int]fieldpath.Errors{}
	for i := range overrides {
		if problem := f.refuseServer(&overrides[i]); problem != nil {
			wrong[i] = fieldpath.Errors{problem}.In(f.place)
		}
	}
	if len(wrong) > 0 {
		return wrong
	}
	merged, m := merge(f.root, overrides)
	_, _, problems := f.read(merged, nil)
	services := servicesOf(merged)
	for _, problem := range problems {
		if at := m.placeOf(problem.Path, services); at.override >= 0 && at.isSetBy(&overrides[at.override]) {
			one := fieldpath.Errors{m.translatedOne(problem, services)}.In(f.place)
			wrong[at.override] = append(wrong[at.override], one...)
		}
	}
	return wrong
}

// servicesOf returns the services of a document.
func servicesOf(root *yaml.Node) []*yaml.Node {
	return elements(child(resolved(root.Content[0]), "services"))
}

// isSetBy tells whether an override gives the field at a place its value.
func (p *mergedPlace) isSetBy(o *desired.Override) bool {
	if o.Target() != p.target.Target() {
		return false
	}
	name, _, _ := strings.Cut(p.rest, ".") // the field of the service or server
	name, _, _ = strings.Cut(name, "[")
	_, sets := o.Set[name]
	return sets || o.Add != nil
}
